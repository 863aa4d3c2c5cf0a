from hyperslab.comm import last_words


def test_a_rank_has_word_of_itself_even_if_nobody_keeps_the_words(monkeypatch):
    def gone():
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(last_words, "_store", gone)
    told = last_words.hear_others(1, 4, 0.1)
    assert told.endswith("its own output says why, there is no word of 0, 2, 3")
