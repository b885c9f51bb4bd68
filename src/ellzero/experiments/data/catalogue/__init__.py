"""The data sets that `load` knows by name: a file each, with its `Facts`."""
