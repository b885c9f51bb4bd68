"""What shrinks together: the axes of a traced model, and the plan that takes units out of it."""

from ellzero.graph.axes import Axis, Block, Graph, Site
from ellzero.graph.plan import ClosedAxisError, Plan
from ellzero.graph.tracing import TraceError, trace

__all__ = ["Axis", "Block", "ClosedAxisError", "Graph", "Plan", "Site", "TraceError", "trace"]
