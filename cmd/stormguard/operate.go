// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/words"
	"github.com/stormguard-mq/stormguard/console"
)

const operateLong = `

--url, or $STORMGUARD_URL, is where the process serves its console: package
console, or "stormguard demo --console". An address beyond loopback needs https
and --token-file. The exit status is 0 when all was done, 1 on an error, 2 for a
mistake on the command line, 3 when no such source or breaker is there, 4 without
the right token, 6 when it was done for some sources only.`

// looks are the formats in which a command prints an answer.
type looks string

func allLooks() []looks { return []looks{"table", "json", "jsonl"} }

// operate holds the flags of all commands that send requests to a console.
type operate struct {
	operator

	output looks
	rs     ranges

	// The fields below are for commands that give an order.
	order console.Order
	lasts time.Duration
	why   string
	in    string
	yes   bool
	dry   bool
}

// partialError is the error of an order that not all sources or processes carried out.
type partialError struct{ error }

// unknownError is the error of a possible change without an answer: its outcome is unknown.
type unknownError struct{ error }

// Unwrap returns why there is no answer.
func (e unknownError) Unwrap() error { return e.error }

// newOperate makes all commands that send requests to a console.
func newOperate() []*cobra.Command {
	source := &cobra.Command{
		Use: "source", Short: "See and change the sources of a process: partitions, queues, consumers",
		Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	source.AddCommand(
		newSourceList(), newSourceShow(),
		newOrder(console.Pause, "pause NAME...", "Hold sources; by themselves they go on after --for"),
		newOrder(console.Resume, "resume NAME...", "End a pause"),
		newOrder(console.DeadLetter, "deadletter NAME...", "Dead-letter messages that failed and wait, without a credit"),
	)
	brk := &cobra.Command{
		Use: "breaker", Short: "See and force the breakers of a process",
		Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	brk.AddCommand(
		newBreakerList(),
		newOrder(console.Open, "open NAME...", "Force breakers open; after --for they probe"),
		newOrder(console.Close, "close NAME...", "Close breakers now; they judge anew from there"),
		newOrder(console.Release, "auto NAME...", "End a force: the breakers probe"),
	)
	return []*cobra.Command{
		newStatus(), source, brk,
		newOrder(console.Credits, "credits NAME...", "Grant sources DLQ credits: leave to dead-letter so many messages more"),
		newQuarantine(), newCauses(), newAudit(), newReport(), newConsole(),
	}
}

// newQuarantine makes the fleet's command quarantine for a console.
func newQuarantine() *cobra.Command {
	op := operator{server: "console", rules: "quarantine"}
	cmd, asking := newFleetQuarantine(&op)
	for _, c := range asking {
		op.bind(c, "where the process serves its console")
		c.Flags().BoolVar(&op.json, "json", false, "print what the process answers")
	}
	return cmd
}

// command completes a command that sends requests to a console: flags, help, checks.
func (o *operate) command(cmd *cobra.Command, run func(cmd *cobra.Command, args []string) error) *cobra.Command {
	o.server, o.output = "console", "table"
	o.bind(cmd, "where the process serves its console")
	var output pflag.FlagSet
	choice(&o.rs, &output, &o.output, "output", allLooks(), "how to print")
	output.VisitAll(func(f *pflag.Flag) {
		f.Shorthand = "o"
		cmd.Flags().AddFlag(f)
	})
	cmd.Long = cmp.Or(cmd.Long, cmd.Short+".") + operateLong
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := o.rs.check(); err != nil {
			return usageError{err}
		}
		return run(cmd, args)
	}
	return cmd
}

func newStatus() *cobra.Command {
	var o operate
	return o.command(&cobra.Command{
		Use: "status", Short: "What is held, why, and who may clear it", Args: cobra.NoArgs,
	}, func(cmd *cobra.Command, _ []string) error {
		var st console.Status
		raw, err := o.ask(cmd.Context(), http.MethodGet, "status", nil, &st)
		if err != nil {
			return err
		}
		return show(&o, cmd, raw, []console.Status{st}, func(w io.Writer, l words.Language) error {
			fmt.Fprint(w, l.Sayf("%s: %s, %d held, %d in a storm, %d paused; %s not closed; %s in hand, %s\n", st.Process,
				l.Count(st.Sources, "source"), st.Held, st.Storms, st.Paused, l.Count(st.Breakers, "breaker"), l.Count(st.Unsettled, "message"),
				l.Count(int(min(st.DeadLettered, math.MaxInt32)), "dead letter")))
			if len(st.Attention) == 0 {
				return nil
			}
			fmt.Fprintln(w)
			return table(w, l, "SOURCE\tWHY\tDETAIL\tFOR AT LEAST\tCLEARED BY", func(row func(...any)) {
				for _, a := range st.Attention {
					row(a.Source, l.Say(a.Reason), a.Detail, seconds(a.Until), a.ClearedBy)
				}
			})
		})
	})
}

func newSourceList() *cobra.Command {
	var o operate
	return o.command(&cobra.Command{
		Use: "list [NAME]", Short: "List sources; NAME may end with * for all that begin so", Args: cobra.MaximumNArgs(1),
	}, func(cmd *cobra.Command, args []string) error {
		all, raw, err := lookup[console.Source](cmd.Context(), &o, "sources", args)
		if err != nil {
			return err
		}
		return show(&o, cmd, raw, all, func(w io.Writer, l words.Language) error {
			return table(w, l, "SOURCE\tGROUP\tSTATE\tBREAKER\tIN HAND\tHELD\tRETRY\tACKED\tDEAD LETTERS\tCREDITS\tOLDEST", func(row func(...any)) {
				for _, s := range all {
					row(s.Name, s.Group, l.Say(s.State), l.Say(s.Breaker.State), inHand(s), s.Holding, s.RetryWait, s.Acked, s.DeadLettered,
						fmt.Sprintf("%.1f", s.Credits), seconds(s.OldestAge))
				}
			})
		})
	})
}

func inHand(s console.Source) int {
	return s.Waiting + s.Processing + s.Settling + s.Holding + s.RetryWait
}

func newSourceShow() *cobra.Command {
	var o operate
	return o.command(&cobra.Command{
		Use: "show NAME", Short: "Show one source: its holds, messages by state, breaker and storm readings", Args: cobra.ExactArgs(1),
	}, func(cmd *cobra.Command, args []string) error {
		all, raw, err := lookup[console.Source](cmd.Context(), &o, "sources", args)
		if err != nil {
			return err
		}
		return show(&o, cmd, raw, all, func(w io.Writer, l words.Language) error {
			for _, s := range all {
				if err := showSource(w, l, s); err != nil {
					return err
				}
			}
			return nil
		})
	})
}

func showSource(w io.Writer, l words.Language, s console.Source) error {
	fmt.Fprint(w, l.Sayf("%s, group %s: %s\n", s.Name, s.Group, l.Say(s.State)))
	for _, h := range s.Holds {
		fmt.Fprint(w, l.Sayf("  held by %s: %s", l.Say(h.Reason), printable(h.Detail, "")))
		if h.Until > 0 {
			fmt.Fprint(w, l.Sayf("; for at least %s", seconds(h.Until)))
		}
		fmt.Fprint(w, l.Sayf("; cleared by %s\n", h.ClearedBy))
	}
	return table(w, l, "", func(row func(...any)) {
		row(l.Say("  messages"), l.Sayf("%d waiting, %d processing, %d settling, %d held, %d waiting to be tried again; room for %d of %d",
			s.Waiting, s.Processing, s.Settling, s.Holding, s.RetryWait, s.Room, s.Window))
		if s.Spilled > 0 {
			row(l.Say("  on disk"), l.Sayf("%d of them", s.Spilled))
		}
		row(l.Say("  since it began"), l.Sayf("%d received, %d acked, %d calls failed, %d dead-lettered, %d in quarantine, %d returned",
			s.Received, s.Acked, s.Failures, s.DeadLettered, s.Quarantined, s.Returned))
		row(l.Say("  oldest message"), seconds(s.OldestAge))
		row(l.Say("  DLQ credits"), fmt.Sprintf("%.1f", s.Credits))
		for _, e := range s.Errors {
			row(l.Say("  error"), l.Sayf("%d messages, up to %d attempts: %s (%s, %s)", e.Messages, e.Attempts, printable(e.Title, "-"), e.Class, e.Cause))
		}
		row(l.Say("  breaker"), breakerText(l, s.Breaker))
		row(l.Say("  storm"), l.Sayf("%s: error rate %.1f %%, %d attempts, age %s", l.Say(map[bool]string{true: "yes", false: "no"}[s.Storm.Active]),
			100*s.Storm.ErrorRate, s.Storm.Attempts, seconds(s.Storm.Age)))
	})
}

// failures is the percentage of failed calls, which only a closed breaker counts.
func failures(b console.Breaker) string {
	if b.State != "closed" {
		return "-"
	}
	return fmt.Sprintf("%.1f %%", 100*b.Ratio)
}

func breakerText(l words.Language, b console.Breaker) string {
	if b.Name == "" {
		return l.Say("none")
	}
	text := l.Sayf("%s: %s for %s, failures %s", b.Name, l.Say(b.State), seconds(b.Since), failures(b))
	if b.State != "closed" {
		text = l.Sayf("%s: %s, not closed for %s, failures %s", b.Name, l.Say(b.State), seconds(b.Since), failures(b))
	}
	if b.Cause != "" {
		text += l.Sayf(", cause %s", b.Cause)
	}
	if b.Forced {
		text += l.Say(", by force")
	}
	return text
}

func newBreakerList() *cobra.Command {
	var o operate
	return o.command(&cobra.Command{
		Use: "list [NAME]", Short: "List breakers; NAME may end with * for all that begin so", Args: cobra.MaximumNArgs(1),
	}, func(cmd *cobra.Command, args []string) error {
		all, raw, err := lookup[console.Breaker](cmd.Context(), &o, "breakers", args)
		if err != nil {
			return err
		}
		return show(&o, cmd, raw, all, func(w io.Writer, l words.Language) error {
			return table(w, l, "BREAKER\tGROUP\tSTATE\tSINCE\tCAUSE\tFORCED\tFAILURES\tSOURCES", func(row func(...any)) {
				for _, b := range all {
					row(b.Name, b.Group, l.Say(b.State), seconds(b.Since), cmp.Or(b.Cause, "-"), forced(b), failures(b), len(b.Sources))
				}
			})
		})
	})
}

// forced says whether a breaker is forced, and for how much longer if the force has an end.
func forced(b console.Breaker) string {
	text := fmt.Sprint(b.Forced)
	if b.Forced && b.Until > 0 {
		text += ", " + seconds(b.Until)
	}
	return text
}

func newAudit() *cobra.Command {
	var o operate
	return o.command(&cobra.Command{
		Use: "audit", Short: "Print the last orders and refused requests of a process, oldest first", Args: cobra.NoArgs,
	}, func(cmd *cobra.Command, _ []string) error {
		all, raw, err := lookup[console.Entry](cmd.Context(), &o, "audit", nil)
		if err != nil {
			return err
		}
		return show(&o, cmd, raw, all, func(w io.Writer, l words.Language) error {
			return table(w, l, "AT\tWHO\tORDER\tWHY\tOUTCOME", func(row func(...any)) {
				for _, e := range all {
					outcome := cmp.Or(e.Error, e.Fleet, l.Count(len(e.Results), "source"))
					if e.Error == "" && strings.HasPrefix(e.Order, "quarantine ") { // such an order has no sources
						outcome = l.Say("done")
					}
					row(e.At.Format(time.RFC3339), e.Who, e.Order, cmp.Or(e.Why, "-"), outcome)
				}
			})
		})
	})
}

func newCauses() *cobra.Command {
	var o operate
	since := 6 * time.Hour
	cmd := &cobra.Command{
		Use: "causes", Short: "Group the dead letters of a process by their error, the most frequent first", Args: cobra.NoArgs,
		Example: `  stormguard causes --since 1h
  stormguard quarantine add --cause v2:a87967c232515c32`,
	}
	o.rs.duration(cmd.Flags(), &since, "since", time.Minute, 7*24*time.Hour, "how far back")
	return o.command(cmd, func(cmd *cobra.Command, _ []string) error {
		all, raw, err := lookup[console.Cause](cmd.Context(), &o, "causes?since="+since.String(), nil)
		if err != nil {
			return err
		}
		return show(&o, cmd, raw, all, func(w io.Writer, l words.Language) error {
			return table(w, l, "DEAD LETTERS\tCAUSE\tERROR\tREASONS\tSOURCES\tFIRST\tLAST", func(row func(...any)) {
				for _, c := range all {
					var reasons []string
					for _, reason := range slices.Sorted(maps.Keys(c.Reasons)) {
						reasons = append(reasons, fmt.Sprint(reason, " ", c.Reasons[reason]))
					}
					row(c.Count, cmp.Or(c.Cause, "-"), oneLine(c.Title), strings.Join(reasons, ", "), strings.Join(c.Sources, ", "),
						c.First.Format(time.TimeOnly), c.Last.Format(time.TimeOnly))
				}
			})
		})
	})
}

// oneLine shortens an error to one line of a table.
func oneLine(text string) string {
	const most = 80
	text = strings.Join(strings.Fields(text), " ")
	if r := []rune(text); len(r) > most {
		return string(r[:most]) + "…"
	}
	return text
}

func newReport() *cobra.Command {
	var o operate
	since := time.Hour
	cmd := &cobra.Command{
		Use: "report", Short: "Print the incident's timeline in Markdown: what tripped, what died, who did what", Args: cobra.NoArgs,
	}
	o.rs.duration(cmd.Flags(), &since, "since", time.Minute, 7*24*time.Hour, "how far back")
	return o.command(cmd, func(cmd *cobra.Command, _ []string) error {
		var st console.Status
		if _, err := o.ask(cmd.Context(), http.MethodGet, "status", nil, &st); err != nil {
			return err
		}
		var all []console.Event
		raw, err := o.ask(cmd.Context(), http.MethodGet, "events?since="+since.String(), nil, &all)
		if err != nil {
			return err
		}
		var causes []console.Cause
		if _, err := o.ask(cmd.Context(), http.MethodGet, "causes?since="+since.String(), nil, &causes); err != nil {
			return err
		}
		return show(&o, cmd, raw, all, func(w io.Writer, l words.Language) error { return report(w, l, since, st, all, causes) })
	})
}

// report writes the timeline of an incident, in Markdown.
func report(w io.Writer, l words.Language, since time.Duration, st console.Status, all []console.Event, causes []console.Cause) error {
	held := 0.0
	for _, e := range all {
		if e.Kind == console.EventClosed {
			held += e.Lasted
		}
	}
	cell := strings.NewReplacer("|", "\\|", "\n", " ")
	var b strings.Builder
	b.WriteString(l.Sayf("# %s: the %v before %s\n\n", st.Process, since, st.At.Format(time.RFC3339)))
	b.WriteString(l.Sayf("Now: %d of %s held, %d in a storm, %d paused, %s in hand.\n", st.Held, l.Count(st.Sources, "source"), st.Storms, st.Paused, l.Count(st.Unsettled, "message")))
	b.WriteString(l.Sayf("Breakers that closed were open for %s, added up.\n\n", cmp.Or(strings.TrimPrefix(seconds(held), "-"), l.Say("no time"))))
	if len(causes) > 0 {
		b.WriteString(l.Say("| dead letters | cause | error | sources |\n") + "|---|---|---|---|\n")
		for _, c := range causes {
			fmt.Fprintf(&b, "| %d | `%s` | %s | %s |\n", c.Count, c.Cause, cell.Replace(oneLine(c.Title)), cell.Replace(strings.Join(c.Sources, ", ")))
		}
		b.WriteString("\n")
	}
	b.WriteString(l.Say("| time | what | where, who | detail |\n") + "|---|---|---|---|\n")
	for _, e := range all {
		what, detail := e.Kind, e.Detail
		switch {
		case e.Count > 0:
			what = l.Count(e.Count, "dead letter")
			detail = l.Sayf("%s (cause `%s`", detail, e.Cause)
			if e.Until.After(e.At) {
				detail += l.Sayf(", until %s", e.Until.Format(time.TimeOnly))
			}
			detail += l.Say(")")
		case e.Lasted > 0:
			what = l.Sayf("%s after %s", what, seconds(e.Lasted))
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", e.At.Format(time.TimeOnly), what, cell.Replace(e.Subject), cell.Replace(detail))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// newOrder makes a command that gives an order to sources, or to the sources of breakers.
func newOrder(action, use, short string) *cobra.Command {
	o := operate{order: console.Order{Action: action}, lasts: 30 * time.Minute}
	o.order.Count = 1
	cmd := &cobra.Command{Use: use, Short: short, Args: cobra.MinimumNArgs(1)}
	f := cmd.Flags()
	lasts, counts := action == console.Pause || action == console.Open, action == console.Credits || action == console.DeadLetter
	if lasts {
		o.rs.duration(f, &o.lasts, "for", time.Second, 24*time.Hour, "how long it lasts")
	}
	if counts {
		o.rs.number(f, &o.order.Count, "count", 1, 100000, "how many, for each source")
	}
	f.StringVar(&o.why, "why", "", "for the audit, such as a ticket; 256 bytes at most")
	f.StringVar(&o.in, "in", "process", "where: process, fleet, or zone:NAME; processes that do not answer are named, and follow when they are heard again")
	f.BoolVar(&o.yes, "yes", false, "do not ask")
	f.BoolVar(&o.dry, "dry-run", false, "change nothing; print which sources it would be")
	cmd.Long = short + `.

NAME may end with * for all that begin so. Before anything is changed the command
asks; --yes answers. The process itself ends a pause or a force after --for, whatever
becomes of this command.`
	if !lasts {
		cmd.Long = short + ".\n\nNAME may end with * for all that begin so. Before anything is changed the command\nasks; --yes answers."
	}
	return o.command(cmd, func(cmd *cobra.Command, args []string) error {
		order := o.order
		order.Why = o.why
		if lasts {
			order.For = console.Duration(o.lasts)
		}
		if !counts {
			order.Count = 0
		}
		if action == console.Open || action == console.Close || action == console.Release {
			order.Breakers = args
		} else {
			order.Sources = args
		}
		order.In = o.in
		return o.give(cmd, order)
	})
}

// give runs the order dry, asks the user, gives the order and prints its outcome.
func (o *operate) give(cmd *cobra.Command, order console.Order) error {
	order.DryRun = true
	var out console.Outcome
	raw, err := o.ask(cmd.Context(), http.MethodPost, "order", order, &out)
	if err != nil {
		return err
	}
	if !o.dry {
		if !o.yes {
			if err := o.leave(cmd, order, out); err != nil {
				return err
			}
		}
		order.DryRun = false
		out = console.Outcome{}
		if raw, err = o.ask(cmd.Context(), http.MethodPost, "order", order, &out); err != nil {
			return err
		}
	}
	err = show(o, cmd, raw, []console.Outcome{out}, func(w io.Writer, l words.Language) error { return o.showOutcome(w, l, order, out) })
	if err != nil {
		return err
	}
	if met := slices.ContainsFunc(out.Processes, func(a console.Answer) bool { return a.Sources > 0 || a.Error != "" }); !o.dry && !met && len(out.Processes) > 0 && len(out.Silent) == 0 {
		return refusedError{http.StatusNotFound, "no process has a source or breaker of that name"}
	}
	return partly(out)
}

func (o *operate) showOutcome(w io.Writer, l words.Language, order console.Order, out console.Outcome) error {
	outcome := func(done int, err string) string {
		switch {
		case err != "":
			return err
		case o.dry:
			return l.Say("not done: --dry-run")
		case order.Action == console.DeadLetter:
			return l.Count(done, "dead letter")
		}
		return l.Say("done")
	}
	if len(out.Processes)+len(out.Silent) == 0 {
		return table(w, l, "SOURCE\tBEFORE\tAFTER\tOUTCOME", func(row func(...any)) {
			for _, r := range out.Results {
				row(r.Source, r.Before, r.After, outcome(r.Count, r.Error))
			}
		})
	}
	return table(w, l, "PROCESS\tSOURCES\tOUTCOME", func(row func(...any)) {
		for _, a := range out.Processes {
			sources := any(a.Sources)
			if o.dry { // the other processes were not asked
				sources = "-"
			}
			row(a.Process, sources, outcome(a.Count, a.Error))
		}
		for _, name := range out.Silent {
			row(name, "-", l.Say("no answer: it follows when it is heard again, in the order's time"))
		}
	})
}

// partly returns a partialError if a source or process did not carry out the order.
func partly(out console.Outcome) error {
	failed, all := 0, len(out.Results)+len(out.Processes)
	for _, r := range out.Results {
		if r.Error != "" {
			failed++
		}
	}
	for _, a := range out.Processes {
		if a.Error != "" {
			failed++
		}
	}
	switch {
	case len(out.Silent) > 0:
		return partialError{fmt.Errorf("no answer from %s", strings.Join(out.Silent, ", "))}
	case failed > 0:
		return partialError{fmt.Errorf("not done by %d of %d", failed, all)}
	}
	return nil
}

// leave asks the user at the terminal for confirmation. Its error is nil if the user agrees.
func (o *operate) leave(cmd *cobra.Command, order console.Order, out console.Outcome) error {
	in, ok := cmd.InOrStdin().(*os.File)
	if !ok || !term.IsTerminal(int(in.Fd())) {
		return usageError{errors.New("--yes: must be given where nobody can be asked")}
	}
	l := words.From(cmd.Context())
	out.Process = printable(out.Process, "")
	about := l.Count(len(out.Results), "source")
	if n := len(out.Processes); n > 0 {
		about = l.Count(n, "process")
	}
	fmt.Fprint(cmd.ErrOrStderr(), l.Sayf("%s: %s (%s). Go on? [y/N] ", out.Process, order, about))
	answer, err := bufio.NewReader(in).ReadString('\n')
	if err != nil || !strings.EqualFold(strings.TrimSpace(answer), "y") {
		return errors.New("nothing was changed")
	}
	return nil
}

// lookup requests the items of a kind that args[0] names, or all items. No item with the
// name is an error.
func lookup[T any](ctx context.Context, o *operate, what string, args []string) (all []T, raw []byte, err error) {
	path := what
	if len(args) > 0 {
		path += "?name=" + url.QueryEscape(args[0])
	}
	raw, err = o.ask(ctx, http.MethodGet, path, nil, &all)
	if err == nil && len(args) > 0 && len(all) == 0 {
		err = refusedError{http.StatusNotFound, fmt.Sprintf("%s: %q is none of this process; \"stormguard %s list\" shows them", what, args[0], strings.TrimSuffix(what, "s"))}
	}
	return all, raw, err
}

// show prints an answer in the format of --output.
func show[T any](o *operate, cmd *cobra.Command, raw []byte, all []T, text func(io.Writer, words.Language) error) error {
	out := cmd.OutOrStdout()
	switch o.output {
	case "json":
		_, err := out.Write(raw)
		return err
	case "jsonl":
		e := json.NewEncoder(out)
		for _, one := range all {
			if err := e.Encode(one); err != nil {
				return err
			}
		}
		return nil
	}
	return text(toTerminal{out}, words.From(cmd.Context()))
}

// seconds formats a time for people; "-" if it is 0 or less.
func seconds(s float64) string {
	if s <= 0 {
		return "-"
	}
	d := time.Duration(s * float64(time.Second))
	if d >= 10*time.Second {
		return d.Round(time.Second).String()
	}
	return d.Round(10 * time.Millisecond).String()
}
