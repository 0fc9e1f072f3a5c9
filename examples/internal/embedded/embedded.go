// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package embedded runs the NATS server of the examples, so that they need no other. Your
// program has a server, and calls nats.Connect.
package embedded

import (
	"errors"
	"os"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// Connect starts a server with JetStream in a temporary directory, and connects
// to it. stop ends both and removes the directory.
func Connect() (nc *nats.Conn, stop func(), err error) {
	dir, err := os.MkdirTemp("", "stormguard-example-")
	if err != nil {
		return nil, nil, err
	}
	srv, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: dir, NoSigs: true, NoLog: true,
	})
	if err != nil {
		return nil, nil, errors.Join(err, os.RemoveAll(dir))
	}
	srv.Start()
	end := func() {
		srv.Shutdown()
		srv.WaitForShutdown()
		_ = os.RemoveAll(dir)
	}
	if !srv.ReadyForConnections(20 * time.Second) {
		end()
		return nil, nil, errors.New("embedded: the server is not ready after 20s")
	}
	// Without MaxReconnects(-1) a client gives up after two minutes.
	nc, err = nats.Connect(srv.ClientURL(), nats.MaxReconnects(-1))
	if err != nil {
		end()
		return nil, nil, err
	}
	return nc, func() { nc.Close(); end() }, nil
}
