#!/usr/bin/env bash
# Unpacks a text corpus from Debian packages, without installing them, as plain files.
#   deploy/corpus.sh bible|linux-doc FOLDER     fills FOLDER with *.txt and LICENCE; nothing is done when that is there
set -euo pipefail
[[ $# == 2 ]] || { echo "usage: deploy/corpus.sh bible|linux-doc FOLDER" >&2; exit 2; }
corpus=$1 folder=$2
[[ -e $folder/LICENCE ]] && exit 0

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"

# Downloads packages and unpacks them into $work/root.
unpack() {
  mkdir -p "$work/root"
  (cd "$work" && { apt-get download -qq "$@" || { apt-get update -qq && apt-get download -qq "$@"; }; }) 2>"$work/log" ||
    { cat "$work/log" >&2; return 1; }
  local deb
  for deb in "$work"/*.deb; do dpkg -x "$deb" "$work/root"; done
}

case $corpus in
  bible)
    unpack bible-kjv bible-kjv-text
    mkdir -p "$work/text"
    # One line a verse, "Ge1:1 In the beginning ...": a file a book, without the references.
    (cd "$work/root/usr/lib" && TERM=dumb ../bin/bible -f 'Gen1:1-Rev22:21') |
      awk -v out="$work/text" '{
        book = $1; sub(/[0-9]+:[0-9]+$/, "", book)
        if (book != last) { close(file); file = sprintf("%s/%02d-%s.txt", out, ++books, book); last = book }
        sub(/^[^ ]+ /, ""); print > file
      }'
    licence="King James Version of the Bible, translated 1611: public domain. From the Debian package bible-kjv-text."
    ;;
  linux-doc)
    unpack linux-doc-6.1
    mkdir -p "$work/text"
    (cd "$work/root" && find . -type f \( -name '*.rst' -o -name '*.rst.gz' -o -name '*.txt' -o -name '*.txt.gz' \) \
      ! -path '*/translations/*' ! -path '*/html/*' | LC_ALL=C sort | while read -r file; do
        name=${file#*/Documentation/}
        zcat -f "$file" >"$work/text/$(tr '/' '_' <<<"${name%.gz}").txt"
      done)
    licence="Documentation of the Linux kernel: GNU General Public License, version 2. From the Debian package linux-doc-6.1."
    ;;
  *)
    echo "corpus.sh: no corpus '$corpus'; there are bible and linux-doc" >&2
    exit 2
    ;;
esac

bytes=$(cat "$work"/text/*.txt | wc -c)
((bytes > 1000000)) || { echo "corpus.sh: only $bytes bytes of text in the packages of $corpus" >&2; exit 1; }
mkdir -p "$folder"
mv "$work"/text/*.txt "$folder"
echo "$licence" >"$folder/LICENCE"
