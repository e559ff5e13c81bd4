"""Matched operations become one module that a compiler has worked on."""
