"""What tests share: each module answers one question, and is imported as ``support.NAME``.

pytest puts the folder ``tests`` on the path of modules (``pythonpath`` in pyproject.toml).
"""
