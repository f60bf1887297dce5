"""Draft-size policies and the costs that they weigh."""
