"""Comparison of values between a scheduled model and the original."""
