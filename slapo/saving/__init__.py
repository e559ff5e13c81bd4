"""Steps of training, saved in a format of their own and resumed at any layout and engine."""
