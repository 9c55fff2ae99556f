# ruff: noqa: T201
print("parcel/__init__", __name__)
