"""Tables cut over ranks: who holds which rows and columns, how ids and vectors travel, one update of what is held."""
