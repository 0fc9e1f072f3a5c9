// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/access"
	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/words"
)

// Exit codes. Scripts rely on them: docs/cli.md.
const (
	exitOK          = 0
	exitError       = 1 // an error; the doctor: findings
	exitUsage       = 2
	exitUnseen      = 3 // the doctor could not look; no such source or breaker
	exitDenied      = 4 // no token, or a wrong one
	exitPartial     = 6 // not all sources or processes carried out an order
	exitInterrupted = 130
)

// usageError is a mistake on the command line, or in a file that it names.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// run is main without [os.Exit]: it returns the exit code.
func run(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once

	begun := false
	l, err := words.Asked(args, os.Getenv)
	if err != nil {
		fmt.Fprintln(stderr, "stormguard:", err)
		return exitUsage
	}
	root := newRoot(&begun)
	translate(root, l)
	ctx = words.With(ctx, l)
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return exitOK
	}
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		if unknown, ok := errors.AsType[unknownError](err); ok {
			fmt.Fprintln(stderr, "stormguard:", printable(unknown.Error(), "\n\t"))
		}
		fmt.Fprintln(stderr, "stormguard: interrupted")
		return exitInterrupted
	}
	fmt.Fprintln(stderr, "stormguard:", printable(err.Error(), "\n\t"))
	// An error before a command begins is about a flag, an argument or a command
	// that cobra does not accept.
	if !begun || errors.As(err, new(usageError)) || errors.As(err, new(access.FlagError)) {
		fmt.Fprintf(stderr, "See %q.\n", cmd.CommandPath()+" --help")
		return exitUsage
	}
	refused, _ := errors.AsType[refusedError](err)
	switch {
	case errors.As(err, new(lookError)), refused.status == http.StatusNotFound:
		return exitUnseen
	case refused.status == http.StatusUnauthorized, refused.status == http.StatusForbidden:
		return exitDenied
	case errors.As(err, new(partialError)):
		return exitPartial
	}
	return exitError
}

// newRoot builds the command tree. begun is set once a command's own code runs.
func newRoot(begun *bool) *cobra.Command {
	root := &cobra.Command{
		Use:   "stormguard",
		Short: "Keep a failing dependency from becoming a dead-letter storm",
		Long: `stormguard stands between a message broker's client and a handler, and keeps a
failing dependency from becoming a dead-letter storm. "stormguard demo" shows it.`,
		SilenceErrors:    true,
		SilenceUsage:     true,
		PersistentPreRun: func(*cobra.Command, []string) { *begun = true },
	}
	root.PersistentFlags().String(words.Flag, "", "the `language` of what the command prints: en or zh (default: that of $LANG)")
	root.AddCommand(newChaos(), newDemo(), newDoctor(), newFleet(), newSimulate(), newVersion())
	root.AddCommand(newOperate()...)
	return root
}
