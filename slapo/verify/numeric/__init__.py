"""Values of a schedule and of the model, compared."""
