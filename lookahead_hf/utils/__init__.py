"""Small helpers that know nothing of models: names, warnings, files, wrappers."""
