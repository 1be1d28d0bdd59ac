"""Table servers: processes that own rows of tables, and the ranks' connections to them."""
