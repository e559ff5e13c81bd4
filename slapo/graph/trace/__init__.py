"""Graphs of modules: what dynamo captures of a forward, and where it is shown."""
