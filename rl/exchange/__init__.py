"""Our worlds in other trainers (`to_*`), and other people's environments in ours (`from_*`)."""
