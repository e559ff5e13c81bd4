"""Speed of scheduling, matching, running and importing: ``python -m benchmark --help``."""
