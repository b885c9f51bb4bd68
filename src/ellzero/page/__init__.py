"""Pages: what a run, several runs and the method look like, each as one HTML file that needs nothing else.

`facts` says what there is to know of a run, `drawing` draws it, `run` makes its page and `serve` shows it while it
trains. `collecting` finds many runs, `runs` compares them, `method` explains the method, all in the look of `charts`.
"""

from ellzero.page.charts import PageMissingError, can_make, write
from ellzero.page.collecting import collect, page_file
from ellzero.page.facts import look, measure_run
from ellzero.page.method import method_page
from ellzero.page.run import run_figures, run_page
from ellzero.page.runs import runs_figures, runs_page
from ellzero.page.serve import Server

__all__ = [
    "PageMissingError", "Server", "can_make", "collect", "look", "measure_run", "method_page", "page_file",
    "run_figures", "run_page", "runs_figures", "runs_page", "write",
]  # fmt: skip
