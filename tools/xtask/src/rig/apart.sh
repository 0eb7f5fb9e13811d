# apart.sh PROGRAM ARGUMENT...: runs the tests of PROGRAM that its ARGUMENTs select one after the other, each in a
# process of its own.
failed=0 names=()
while read -r name; do
  [[ $name != *": test" ]] || names+=("${name%: test}")
done < <("$@" --list --format terse 2>/dev/null)
((${#names[@]} > 0)) || { printf 'no test is selected\n'; exit 1; }
for name in "${names[@]}"; do
  "$1" --exact "$name" --show-output || failed=1
done
exit "$failed"
