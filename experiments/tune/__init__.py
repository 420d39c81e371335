"""Settings chosen on validation examples, with equal budgets for all methods."""
