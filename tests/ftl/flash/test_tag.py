"""Every field of a tag survives encoding, at its limits too, and kinds never collide."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftl.flash import tag
from ftl.flash.tag import PageKind

GROUP_KINDS = st.sampled_from([kind for kind in range(1, tag.KINDS) if kind not in (PageKind.JOURNAL, PageKind.BLOCK)])


@given(
    GROUP_KINDS,
    st.integers(0, tag.MAX_OWNERS - 1),
    st.integers(0, tag.MAX_LAYERS - 1),
    st.integers(1, 5),
    st.lists(st.integers(0, tag.MAX_GROUPS - 1), min_size=1, max_size=4),
)
def test_group_tags_round_trip(kind, owner, layer, streams, groups):
    tags = tag.group_tags(kind, owner, layer, streams, np.array(groups))
    assert tags.shape == (streams, len(groups))
    assert (tag.kinds(tags) == kind).all() and (tag.owners(tags) == owner).all() and tag.is_group(tags).all()
    layers, found_streams, found_groups = tag.group_places(tags)
    assert (layers == layer).all()
    assert (found_streams == np.arange(streams)[:, None]).all() and (found_groups == np.array(groups)).all()


@given(st.integers(0, 1 << 40), st.integers(0, 1), st.integers(1, tag.MAX_RECORD_PAGES - 1))
def test_record_tags_round_trip(number, place, count):
    tags = tag.record_tags(number, place, count)
    numbers, places, pages, counts = tag.record_fields(tags)
    assert (places == place).all()
    assert (tag.kinds(tags) == PageKind.JOURNAL).all() and not tag.is_group(tags).any()
    assert (numbers == number % tag.MAX_RECORDS).all() and (pages == np.arange(count)).all() and (counts == count).all()


@given(st.integers(0, tag.MAX_LOGICAL_PAGES - 1))
def test_logical_page_tags_round_trip(lpn):
    tags = tag.block_tags(np.array([lpn]))
    assert tag.kinds(tags) == PageKind.BLOCK and tag.logical_pages(tags) == lpn and not tag.is_group(tags).any()


def test_range_of_kind_in_sorted_tags():
    groups = [
        tag.group_tags(kind, 3, 2, 2, np.arange(5)).reshape(-1) for kind in (PageKind.K, PageKind.V, tag.KINDS - 1)
    ]
    tags = np.sort(np.concatenate([*groups, tag.block_tags(np.array([0, 7, tag.MAX_LOGICAL_PAGES - 1]))]))
    for kind in range(tag.KINDS):
        assert (tags[tag.of_kind(tags, kind)] == tags[tag.kinds(tags) == kind]).all(), kind
    assert tags[tag.of_kind(tags, PageKind.BLOCK)].size == 3


@pytest.mark.parametrize("kind", [PageKind.JOURNAL, PageKind.BLOCK, 0, tag.KINDS])
def test_group_tag_of_non_group_kind_is_refused(kind):
    with pytest.raises(AssertionError, match="no group's"):
        tag.group_tags(kind, 0, 0, 1, np.zeros(1, np.int64))
