"""The result of a command: `report` saves it, `verdict` is a statement, `page` and `figures` are its HTML."""
