"""From a model to a log: models, prompts, and the attention that sees whole rows."""
