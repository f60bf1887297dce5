"""How many nodes of a draft are verified, and what that costs."""
