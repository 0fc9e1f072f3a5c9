// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/words"
)

// headings are the headings of cobra's help.
var headings = []string{
	"Usage:", "Aliases:", "Examples:", "Available Commands:", "Additional Commands:", "Global Flags:", "Flags:", "Additional help topics:",
	`Use "{{.CommandPath}} [command] --help" for more information about a command.`,
}

// translate translates the help of all commands into a language.
func translate(root *cobra.Command, l words.Language) {
	if l == words.English {
		return
	}
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	var said []string
	for _, heading := range headings {
		said = append(said, heading, l.Say(heading))
	}
	root.SetUsageTemplate(strings.NewReplacer(said...).Replace(root.UsageTemplate()))
	translateCommand(root, l)
}

// translateCommand translates a command and its subcommands: the short text and the flags. Of
// the long text it translates only operateLong, the end that all commands for a console share.
func translateCommand(cmd *cobra.Command, l words.Language) {
	cmd.Short = l.Say(cmd.Short)
	if long, ok := strings.CutSuffix(cmd.Long, operateLong); ok {
		cmd.Long = long + l.Say(operateLong)
	}
	cmd.InitDefaultHelpFlag()
	say := func(f *pflag.Flag) { f.Usage = l.Say(f.Usage) }
	cmd.Flags().VisitAll(say)
	cmd.PersistentFlags().VisitAll(say)
	cmd.Flags().Lookup("help").Usage = l.Say("this help")
	for _, c := range cmd.Commands() {
		translateCommand(c, l)
	}
}
