"""Lets tools that still look for ``setup.py`` find the project; pyproject.toml says the rest."""

from setuptools import setup

setup()
