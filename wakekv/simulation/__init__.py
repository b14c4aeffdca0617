"""What a policy costs: the rule step by step, every budget in one pass, and policies against each other."""
