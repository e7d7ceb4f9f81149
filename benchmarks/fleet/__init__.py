"""What a pool, a disk and a cluster tier of given sizes bring: traces replayed by the daemon's own decisions."""
