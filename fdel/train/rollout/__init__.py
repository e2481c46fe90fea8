"""Learning from own samples: what turns rewards into advantages, and chooses which samples are learnt."""
