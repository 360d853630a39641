"""Networks in files come back exactly, or not at all."""

import json
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncfed.errors import TopologyError
from topologies import (
    Device,
    edgeless,
    from_file,
    from_recipe,
    random_geometric,
    ring,
    save,
    star,
    stochastic_directed,
    with_devices,
    with_links,
)
from topologies._marks import MARKS

SUFFIXES = pytest.mark.parametrize("suffix", [".graphml", ".json"])

positive = st.floats(0, 1e300, exclude_min=True)
shares = st.floats(0, 1, exclude_min=True, exclude_max=True)
words = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1).filter(
    str.isprintable
)


@st.composite
def networks(draw: st.DrawFn) -> nx.Graph:
    n = draw(st.integers(1, 6))
    graph = nx.DiGraph() if draw(st.booleans()) else nx.Graph()
    graph.add_nodes_from(range(n))
    graph.graph.update(name=draw(words), server=draw(st.integers(0, n - 1)))
    graph.graph.update(temperature=draw(positive), extra="temperature")
    for i in range(n):
        for j in range(n) if graph.is_directed() else range(i):
            if i != j and draw(st.booleans()):
                values = {"probability": draw(shares), "latency": draw(positive), "loss": draw(shares)}
                kept = draw(st.sets(st.sampled_from(sorted(values))))
                graph.add_edge(i, j, **{mark: values[mark] for mark in kept})
    return graph


def assert_identical(one: nx.Graph, other: nx.Graph) -> None:
    assert type(one) is type(other)
    # repr tells 1 from 1.0 and True, and every float to the last bit.
    assert repr(sorted(one.graph.items())) == repr(sorted(other.graph.items()))
    assert repr(list(one.nodes(data=True))) == repr(list(other.nodes(data=True)))
    assert [repr((i, j, sorted(d.items()))) for i, j, d in one.edges(data=True)] == [
        repr((i, j, sorted(d.items()))) for i, j, d in other.edges(data=True)
    ]


@SUFFIXES
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(graph=networks())
def test_a_network_comes_back_exactly(suffix: str, graph: nx.Graph, tmp_path: Path) -> None:
    path = tmp_path / f"network{suffix}"
    save(graph, path)
    assert_identical(from_file(path), graph)


@SUFFIXES
def test_generated_networks_come_back_with_name_server_recipe_and_marks(suffix: str, tmp_path: Path) -> None:
    for graph in (
        stochastic_directed(5, seed=3),
        star(3, up=(0.2, 0.4), seed=1),
        edgeless(1),
        random_geometric(6, 0.7, seed=1, latency=(0.1, 1 / 3)),
        with_devices(star(4), {"phone": Device(4, 1e5, 1e6), "desktop": Device()}, seed=2),
        with_links(ring(4), latency=0.1, bandwidth=1e6 / 3, loss=1e-17),
    ):
        save(graph, str(tmp_path / f"g{suffix}"))
        assert_identical(from_file(str(tmp_path / f"g{suffix}")), graph)
    save(star(3, up=(0.2, 0.4), seed=1), tmp_path / f"g{suffix}")
    star_again = from_file(tmp_path / f"g{suffix}")
    assert_identical(from_recipe(star_again.graph["recipe"]), star_again)


@SUFFIXES
def test_attributes_of_nodes_and_mixed_numbers_keep_their_types(suffix: str, tmp_path: Path) -> None:
    graph = ring(3)
    graph.nodes[1].update(place="Zürich <north>", rank=3, share=0.1, fast=True)
    graph.edges[0, 1]["latency"] = 2
    graph.edges[1, 2]["latency"] = 2.0
    graph.graph.update(note="", extra="fast, note, place, rank, share")
    save(graph, tmp_path / f"g{suffix}")
    assert_identical(from_file(tmp_path / f"g{suffix}"), graph)


def test_saving_never_changes_the_graph_itself(tmp_path: Path) -> None:
    graph = ring(3)
    graph.graph.update(id="GraphML keeps this elsewhere", extra="id")
    with pytest.raises(TopologyError, match=r"\.graphml would change an attribute"):
        save(graph, tmp_path / "g.graphml")
    assert graph.graph["id"] == "GraphML keeps this elsewhere"


@SUFFIXES
def test_saving_replaces_the_file_and_leaves_nothing_beside_it(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"g{suffix}"
    save(ring(3), path)
    save(ring(4), path)
    assert_identical(from_file(path), ring(4))
    assert list(tmp_path.iterdir()) == [path]


@SUFFIXES
def test_a_graph_that_cannot_be_saved_exactly_leaves_the_old_file_alone(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"g{suffix}"
    save(ring(3), path)
    graph = ring(4)
    graph.graph.update(tags=("a", "b"), extra="tags")
    with pytest.raises(TopologyError, match=rf"cannot save .*g\{suffix}: "):
        save(graph, path)
    graph.graph["tags"] = object()
    with pytest.raises(TopologyError, match=rf"cannot save .*g\{suffix}: "):
        save(graph, path)
    assert_identical(from_file(path), ring(3))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["bell \x07", "\ud800", "carriage\rreturn"])
def test_text_that_graphml_cannot_hold_is_refused(text: str, tmp_path: Path) -> None:
    graph = ring(3)
    graph.graph.update(note=text, extra="note")
    with pytest.raises(TopologyError, match="cannot save"):
        save(graph, tmp_path / "g.graphml")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["g.pickle", "g", "g.gml", "g.json.gz"])
def test_another_ending_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=rf"{name} ends in .*kept in .*.graphml"):
        save(ring(3), tmp_path / name)
    with pytest.raises(TopologyError, match=rf"{name} ends in"):
        from_file(tmp_path / name)


@SUFFIXES
def test_a_missing_file_is_named(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=rf"cannot read .*gone\{suffix}: No such file"):
        from_file(tmp_path / f"gone{suffix}")


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"cannot save .*g\.json: there is no directory .*nowhere"):
        save(ring(3), tmp_path / "nowhere" / "g.json")


@SUFFIXES
def test_a_file_cut_off_anywhere_is_refused(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"g{suffix}"
    save(stochastic_directed(3), path)
    whole = path.read_bytes().rstrip()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(TopologyError, match=rf"cannot read .*g\{suffix} as a topology"):
            from_file(path)


@SUFFIXES
@pytest.mark.parametrize(
    "content",
    [b"\x80\x04\x95pickle", b"<html></html>", b"{}", b"[1, 2]", b"null", b"\xff\xfe", b"[" * 100_000],
)
def test_a_foreign_file_is_refused_by_name(suffix: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"foreign{suffix}"
    path.write_bytes(content)
    with pytest.raises(TopologyError, match=rf"cannot read .*foreign\{suffix} as a topology"):
        from_file(path)


@SUFFIXES
def test_nodes_keep_their_names(suffix: str, tmp_path: Path) -> None:
    graph = nx.relabel_nodes(star(3), {0: "ann", 1: "bob", 2: "cid \u00e4", 3: "hub"})
    graph.graph["server"] = "hub"
    numbered = nx.relabel_nodes(ring(3), {0: 7, 1: 9, 2: 11})
    for network in (graph, numbered):
        save(network, tmp_path / f"g{suffix}")
        assert_identical(from_file(tmp_path / f"g{suffix}"), network)


@pytest.mark.parametrize("suffix", [".graphml", ".gexf"])
def test_what_other_tools_wrote_is_read_with_names_and_marks(suffix: str, tmp_path: Path) -> None:
    theirs = nx.DiGraph()
    theirs.add_node("n0", label="ann", compute=2.0)
    theirs.add_node("n1", label="bob")
    theirs.add_edge("n0", "n1", probability="0.5", latency="exponential(0.2)", weight=3.0)
    theirs.add_edge("n1", "n0", probability="0.25", latency="1")
    {".graphml": nx.write_graphml, ".gexf": nx.write_gexf}[suffix](theirs, tmp_path / f"g{suffix}")
    with pytest.raises(TopologyError, match=r"unknown attribute of edge ann→bob 'weight'.*one of your own"):
        from_file(tmp_path / f"g{suffix}")
    graph = from_file(tmp_path / f"g{suffix}", server="bob", extra=["weight"])
    assert list(graph.nodes(data=True)) == [("ann", {"compute": 2.0}), ("bob", {})]
    assert {edge: graph.edges[edge] for edge in graph.edges} == {
        ("ann", "bob"): {"probability": 0.5, "latency": "exponential(0.2)", "weight": 3.0},
        ("bob", "ann"): {"probability": 0.25, "latency": 1.0},
    }
    assert (graph.graph["server"], graph.graph["extra"]) == ("bob", "weight")
    with pytest.raises(TopologyError, match="directed is False, but its links have directions"):
        from_file(tmp_path / f"g{suffix}", directed=False, extra=["weight"])


@pytest.mark.parametrize(
    "change",
    [
        {"format": "asyncfed topology 2"},
        {"edges": [[0, 3, {}]]},
        {"edges": [[0, 1, {}], [1, 0, {}]]},
        {"edges": [[0, True, {}]]},
        {"edges": [[0, 1]]},
        {"edges": [[0, [1], {}]]},
        {"edges": [[0, 1, 5]]},
        {"nodes": 3},
        {"nodes": [1, 2, 3]},
        {"graph": 3},
        {"nodes": []},
        {"edges": [[1, 1, {}]]},
        {"edges": [[0, 1, {"probability": 1.5}]]},
        {"edges": [[0, 1, {"loss": "high"}]]},
        {"graph": {"server": 3}},
        {"graph": {"server": [0]}},
    ],
)
def test_json_that_breaks_the_format_or_a_convention_is_refused_by_name(
    change: dict[str, object], tmp_path: Path
) -> None:
    path = tmp_path / "g.json"
    save(ring(3), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(TopologyError, match=r"cannot read .*g\.json"):
        from_file(path)


@SUFFIXES
@pytest.mark.parametrize("mark", MARKS)
def test_a_network_with_a_bad_mark_is_not_saved(suffix: str, mark: str, tmp_path: Path) -> None:
    graph = ring(3, directed=True)
    graph.edges[1, 2][mark] = -1.0
    with pytest.raises(TopologyError, match=rf"cannot save .*: {mark} of edge 1→2 is -1.0; it must"):
        save(graph, tmp_path / f"g{suffix}")


def test_what_is_no_network_is_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    with pytest.raises(TopologyError, match=r"nodes must be 0..n-1 in order, or have names"):
        save(nx.Graph([(1, 0)]), path)
    with pytest.raises(TopologyError, match=r"nodes must be called by text or whole numbers"):
        save(nx.Graph([((0, 1), "b")]), path)
    with pytest.raises(TopologyError, match=r"nodes must be 0..n-1 in order"):
        save(nx.Graph(), path)
    with pytest.raises(
        TopologyError, match=r"(it must be a networkx graph|is not a networkx Graph or DiGraph)"
    ):
        save(nx.MultiGraph([(0, 1)]), path)
    with pytest.raises(
        TopologyError, match=r"(it must be a networkx graph|is not a networkx Graph or DiGraph)"
    ):
        save("ring", path)
    with pytest.raises(TopologyError, match="node 0 has a self-loop"):
        save(nx.Graph([(0, 0), (0, 1)]), path)
    with pytest.raises(TopologyError, match="its server 9 is not a node"):
        save(nx.Graph([(0, 1)], server=9), path)
    assert list(tmp_path.iterdir()) == []
