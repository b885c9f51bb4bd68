"""Pages: what a run, several runs and the method look like, each as one HTML file that needs nothing else.

Where a number of a page comes from: `facts` reads a run's folder, `looking` its network, `collecting` many folders.
What is drawn of it: `progress` over epochs, `network` what is left, and `run`, `runs` and `method` a page each, in the
look of `charts`. `serve` shows the page of a run while it trains. Nothing here trains, or knows the command line.
"""

from ellzero.page.charts import PageMissingError, can_make, write
from ellzero.page.collecting import collect, page_file
from ellzero.page.facts import measure_run
from ellzero.page.looking import Look, look
from ellzero.page.method import method_page
from ellzero.page.run import run_figures, run_page
from ellzero.page.runs import runs_figures, runs_page
from ellzero.page.serve import Server

__all__ = [
    "Look",
    "PageMissingError",
    "Server",
    "can_make",
    "collect",
    "look",
    "measure_run",
    "method_page",
    "page_file",
    "run_figures",
    "run_page",
    "runs_figures",
    "runs_page",
    "write",
]
