#!/usr/bin/env bash
# join.sh [DESTINATION]: on the GPU machine, checks the parts of the archive that lie beside this script, with those that
# earlier calls have kept, and unpacks them into DESTINATION (/tmp/site).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
site=${1:-/tmp/site}
kept=$site.parts
mkdir -p "$kept"
cp "$here"/SHA256SUMS "$here"/bundle.tar.xz.* "$kept"/
cd "$kept"
sha256sum --check --quiet SHA256SUMS
rm -rf "$site" "$site.new"
mkdir "$site.new"
# tarfile's own "r|xz" decompresses a chunk at once, however long: a blanked kernel is copied thousands of times.
awk '{print $2}' SHA256SUMS | xargs cat | python3 -c '
import lzma, sys, tarfile
with lzma.open(sys.stdin.buffer) as source, tarfile.open(fileobj=source, mode="r|") as archive:
    archive.extractall(sys.argv[1], filter="data")' "$site.new"
mv "$site.new/site" "$site"
rmdir "$site.new"
echo "unpacked to $site: export PYTHONPATH=$site"
