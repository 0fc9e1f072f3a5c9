// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command bench measures stormguard against what people use today.
//
//	bench GROUP [--json] [--rounds N] [--time D] [--patience D]
//
// The cases of a group run in one process and take turns, round after round,
// because two runs a minute apart differ by more than most of what there is to
// measure. What counts is the ratio within a round; the report gives the median
// over the rounds, and the range, which says whether to believe it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"time"
)

// A bench is what the command line names: a [Group], or one with figures of its
// own.
type bench interface {
	title() (name, about string)
	measure(ctx context.Context, set Settings) (printer, error)
}

// A printer is a report.
type printer interface {
	WriteJSON(w io.Writer) error
	WriteTable(w io.Writer) error
}

// groups are the comparisons, in the order of the help. A file of its own
// defines each one.
var groups = []Group{
	noise,
	hotpath,
	ring,
	durable,
	limit,
	jetStream,
	kafka,
	rabbitMQ,
	onceGroup,
}

// benches is the table that GROUP is looked up in.
func benches() []bench {
	all := make([]bench, 0, len(groups)+2)
	for _, g := range groups {
		all = append(all, g)
	}
	return append(all, scopes, gossiping)
}

func main() {
	if spec := os.Getenv(gcEnv); spec != "" {
		if err := runHolder(spec, os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
			os.Exit(1)
		}
		return
	}
	if spec := os.Getenv(memberEnv); spec != "" {
		if err := runMember(spec, os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
	case errors.As(err, new(usageError)):
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// A usageError is a mistake on the command line, as against a case that failed.
type usageError string

func (e usageError) Error() string { return string(e) }

// run is main without the process: stdout gets the report and nothing else.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	asJSON := flags.Bool("json", false, "print one JSON object in place of the table")
	rounds := flags.Int("rounds", 0, "rounds to take the median of (default: the group's, 9 for most)")
	roundTime := flags.Duration("time", 200*time.Millisecond, "what one case runs for in one turn, about")
	wait := flags.Duration("patience", patience, "after how long no round is taken in place of one that did not count")
	flags.Usage = func() {
		fmt.Fprint(stderr, "usage: bench GROUP [--json] [--rounds N] [--time D] [--patience D]\n\ngroups:\n")
		for _, b := range benches() {
			name, about := b.title()
			fmt.Fprintf(stderr, "  %-10s %s\n", name, about)
		}
		fmt.Fprint(stderr, "\nflags:\n")
		flags.PrintDefaults()
	}

	// Flags may stand before the group or after it; the flag package stops at
	// the first word that is none.
	if err := flags.Parse(args); err != nil {
		return flagError(err)
	}
	name := flags.Arg(0)
	if name == "" {
		flags.Usage()
		return usageError("which group?")
	}
	if err := flags.Parse(flags.Args()[1:]); err != nil {
		return flagError(err)
	}
	if flags.NArg() > 0 {
		return usageError(fmt.Sprintf("one group at a time; what is %q?", flags.Arg(0)))
	}
	all := benches()
	i := slices.IndexFunc(all, func(b bench) bool { title, _ := b.title(); return title == name })
	if i < 0 {
		flags.Usage()
		return usageError(fmt.Sprintf("no group %q", name))
	}
	if *rounds < 0 || *roundTime <= 0 || *wait <= 0 {
		return usageError("--rounds, --time and --patience must be positive")
	}

	fmt.Fprintf(stderr, "%s: %s, %s/%s, GOMAXPROCS %d\n",
		name, runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.GOMAXPROCS(0))
	report, err := all[i].measure(ctx, Settings{Rounds: *rounds, Time: *roundTime, Patience: *wait, Log: stderr})
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if *asJSON {
		return report.WriteJSON(stdout)
	}
	return report.WriteTable(stdout)
}

// flagError marks what the flag package has already explained on stderr.
func flagError(err error) error {
	if errors.Is(err, flag.ErrHelp) {
		return err
	}
	return usageError(err.Error())
}
