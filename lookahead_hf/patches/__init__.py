"""Changes to a model that are in force in our forwards alone."""
