raise RuntimeError("this package can't be imported")
