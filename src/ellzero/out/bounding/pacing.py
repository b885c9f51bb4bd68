"""How long gates learn in a run, and how fast, if nobody says otherwise. It knows numbers of steps alone."""

from __future__ import annotations

# The share of the steps in which gates learn. A small ResNet on CIFAR-100 (`benchmarks/own_loop.py`), 8 epochs, two
# seeds, 30 and 15 % of the MACs: 47.2 and 52.5 % error with 0.1, 45.6 and 52.2 % with 0.25, 45.9 and 51.3 % with 0.4.
# Trained before: 46.7 and 53.2 % with 0.25, 46.5 and 52.5 % with 0.5. Long runs need less: of 78,000 steps ViT-Lite
# ends at 9.00 % with 2,300, at 9.27 % with 7,800, at 9.66 % with 31,000 (`vit-cifar10`); WRN-28-10 learns for 1,950.
LEARNING, ENOUGH, OF_LONG = 0.4, 4_000, 0.05
FALLING = 0.5  # the share of these in which the target comes down
TRAVEL = 25.0  # by how much log α can move while gates learn: a choice takes about 4
FASTEST = 0.3  # the highest rate of the gates: with 0.1 the settling closes most in 200 steps (`benchmarks/pacing.py`)


def steps_of_learning(steps: int) -> int:
    """In how many steps of a run gates learn: two fifths of up to 10,000; of more 4,000 or, if more, a twentieth."""
    return max(1, round(min(LEARNING * steps, max(ENOUGH, OF_LONG * steps))))


def gate_rate(learning: int) -> float:
    """The rate of gates that learn for so many steps, with Adam."""
    return min(FASTEST, TRAVEL / learning)
