"""Rollouts on the nodes of a Ray cluster. `link` is the only module that knows Ray.

A host actor on each node carries out whole rollouts (`host`). The run plans, grades and writes on its own machine,
and places plans on nodes (`members`, `node`, `nodes`, `placement`). `order` has what crosses between the two,
`parcels` files, `image` the sandbox image. `doctor` looks at all nodes before a run.
"""
