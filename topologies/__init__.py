"""Networks to run on: networkx graphs whose edges say how often, how fast and how well they carry messages.

An edge is (sender, receiver). In an undirected graph both directions of an edge exist or fail together at
each step; in a directed graph every direction is drawn on its own. Every edge carries `probability` in (0, 1]
and may carry `latency`, `bandwidth` and `loss`, and what changes with time: `schedule` and `bursts` (see
asyncfed.network); a node may carry `compute`, `uplink`, `downlink`, `device` and `pos`. Anything else is
refused, unless `graph.graph["extra"]` lists it. Clients are the nodes in order: 0..n-1, or with names, which
are kept. Self-loops are
implicit and never in the graph, `graph.graph["name"]` is for people and `graph.graph["server"]` is the
server's node where there is one. A generator called with plain arguments also notes them in
`graph.graph["recipe"]`, from which `from_recipe` makes the same graph again.
"""

from topologies._recipes import from_recipe
from topologies.devices import Device, with_devices
from topologies.files import from_file, save
from topologies.fixed import edgeless, fully_connected, grid, ring, torus
from topologies.links import by_distance, with_links
from topologies.random_graphs import erdos_renyi, random_geometric, random_graph, small_world
from topologies.stochastic import star, stochastic_directed, stochastic_undirected

__all__ = [
    "Device",
    "by_distance",
    "edgeless",
    "erdos_renyi",
    "from_file",
    "from_recipe",
    "fully_connected",
    "grid",
    "random_geometric",
    "random_graph",
    "ring",
    "save",
    "small_world",
    "star",
    "stochastic_directed",
    "stochastic_undirected",
    "torus",
    "with_devices",
    "with_links",
]
