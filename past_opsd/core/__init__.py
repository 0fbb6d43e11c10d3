"""What everything speaks in: nouns and terms, losses, recipes, prompts, the group sampler, statistics, files."""
