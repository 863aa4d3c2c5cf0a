from hypothesis import given, strategies as st

from hyperslab.layout import FoldedRows, Span, TransposedWindow

ROWS = st.builds(
    TransposedWindow, st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(1, 2)
)


@given(ROWS, st.integers(1, 6), st.integers(1, 6))
def test_rows_read_whole_rows_of_patches(
    rows: TransposedWindow, num_across: int, num_rows: int
) -> None:
    folded = FoldedRows(rows, num_across)
    height = folded.output_extent(num_rows * num_across)
    assert height == rows.output_extent(num_rows)
    for row in range(height):
        patches, columns = rows.reads(Span(row, row + 1)), folded.reads(Span(row, row + 1))
        assert columns == Span(patches.start * num_across, patches.stop * num_across)


@given(ROWS, st.integers(1, 6), st.integers(0, 9))
def test_rows_are_cut_where_rows_of_patches_are(
    rows: TransposedWindow, num_across: int, cut: int
) -> None:
    assert FoldedRows(rows, num_across).output_cut(cut * num_across) == rows.output_cut(cut)
