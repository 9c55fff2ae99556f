"""The same run on a cluster: sent through submitit, completed on the nodes, followed to its end."""
