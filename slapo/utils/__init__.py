"""Helpers for inspecting modules and resource usage."""
