"""Published tables and figures, made again: ours beside the papers'."""

from ellzero.experiments.study.making import Reproduction, draw, reproduce, stored
from ellzero.experiments.study.records import by_epoch, point_at_end_of_training, table, took
from ellzero.experiments.study.rows import Row, Study, StudyError, find, studies

__all__ = [
    "Reproduction", "Row", "Study", "StudyError", "by_epoch", "draw", "find", "point_at_end_of_training", "reproduce",
    "stored", "studies", "table", "took",
]  # fmt: skip
