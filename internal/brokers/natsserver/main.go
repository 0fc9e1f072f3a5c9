// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command natsserver runs the nats-server that the tests of this module link, in a process
// of its own so that it can be killed. Its one argument is a configuration file. It ends on
// SIGTERM.
package main

import (
	"fmt"
	"os"

	"github.com/nats-io/nats-server/v2/server"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "natsserver:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("want one argument, a configuration file; got %d", len(args))
	}
	opts, err := server.ProcessConfigFile(args[0])
	if err != nil {
		return err
	}
	srv, err := server.NewServer(opts)
	if err != nil {
		return err
	}
	srv.ConfigureLogger()
	if err := server.Run(srv); err != nil {
		return err
	}
	srv.WaitForShutdown()
	return nil
}
