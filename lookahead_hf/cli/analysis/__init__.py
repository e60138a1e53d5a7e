"""Parts of `lookahead-hf analyze`: prompts, costs, replayed texts, and the report."""
