"""What shrinks together: the axes of a traced model, and the plan that takes units out of it."""
