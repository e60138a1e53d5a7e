"""What `lookahead-hf analyze` computes: prompts, costs, replayed texts, and the report."""
