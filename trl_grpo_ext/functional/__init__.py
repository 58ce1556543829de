"""Pure tensor maths, torch only: the formulas that the strategy objects call."""
