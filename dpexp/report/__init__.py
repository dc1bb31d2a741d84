"""From the results of runs to tables, files and scaling figures."""
