"""Pages: what a run, several runs and the method look like, each as one HTML file that needs nothing else.

`charts` has the look that they share, `run` the page of a run, `runs` that of several, `method` that of the hard
concrete; `serve` shows the page of a run while it trains. Nothing here trains, and nothing here knows the command line.
"""

from __future__ import annotations
