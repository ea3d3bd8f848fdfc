"""The result of a command: `report` saves it, `page` writes its HTML, and `drawing` draws the data of `figures`."""
