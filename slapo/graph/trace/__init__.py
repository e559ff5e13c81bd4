"""Graphs of modules: dynamo captures of a forward, and traced modules that show them."""
