"""Expert parallelism: experts on the ranks that own them, rows exchanged in steps, copies of popular experts."""
